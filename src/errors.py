"""The one exception that a user's mistake raises."""


class UserError(Exception):
    """A mistake in the user's request: one line that says what was wrong, what is allowed, what was meant.

    Entry points print it without a traceback and exit with status 2.
    """
