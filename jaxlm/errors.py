"""The one exception for what a user can cause and repair."""


class UserError(ValueError):
    """A mistake in a configuration, a file or a command line.

    Its text names the file, key or record, what was expected and what to do. Scripts print it
    as ``error: TEXT`` and exit with code 2; nothing else of jaxlm catches it.
    """


class Failure(Exception):
    """Something beyond the settings went wrong; scripts print the one line and exit with 1."""
