"""The one exception for mistakes that a user can mend."""


class UserError(Exception):
    """Ends a script with its message as one clear line and exit status 2, before the first update.

    Every rank raises the same one, and one process per machine prints it; `on_one_rank` marks one that a single rank met.
    """

    on_one_rank = False
