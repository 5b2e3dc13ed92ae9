"""The signals by which a run is told to stop."""

import signal

CAUGHT = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGINT)
