"""Errors that a user can act on."""


class FlowRLError(Exception):
    """Bad input or a bad state of the world, told in one readable line: the value, what is allowed, the remedy.

    The command-line programs print the message alone and exit with code 2.
    """
