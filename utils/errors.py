"""The one exception for mistakes that a user can mend."""


class UserError(Exception):
    """Ends a script with its message as one clear line and exit status 2, before the first update.

    Whichever rank meets it first prints it (see `cli.run_script`).
    """
