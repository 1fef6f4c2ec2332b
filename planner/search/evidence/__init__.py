"""What speaks for a plan: the certificate, alternatives, what holds around it."""
