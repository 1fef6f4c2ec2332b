"""Traces and what is known of them: formats, sessions, lengths, shared prefixes; traffic without a trace."""
