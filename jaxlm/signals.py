"""Which signals end long work in order."""

import signal


def ending() -> tuple[signal.Signals, ...]:
    """The signals after which work is saved and left.

    SIGHUP is one of them unless it is ignored, as under nohup: work then outlives its terminal.
    """
    hangup = () if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else (signal.SIGHUP,)
    return (signal.SIGTERM, signal.SIGINT, *hangup)
