"""Errors that are the user's to fix. The command line prints their text without a traceback."""


class UserError(Exception):
    """Says what was expected, what came and how to fix it."""


class ConfigError(UserError):
    """A configuration key that is unknown, of the wrong type or impossible next to another."""


class DataError(UserError):
    """Bad input data, with its place: file, line, field."""


class ModelError(UserError, ValueError):
    """A model folder, or a layout for it, that cannot be built."""
