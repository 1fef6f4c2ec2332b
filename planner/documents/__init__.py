"""The files people write and we write: each is read and written in one module."""
