"""What every tier's tests share."""

from __future__ import annotations

import signal

from hypothesis import HealthCheck, settings

# A busy machine is no fault of the code: property tests are judged by what they find, not by how long they
# take.
settings.register_profile("neuronfleet", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("neuronfleet")

# A run that was started in the background inherits an ignored SIGINT, and so would every program that a test
# interrupts as Ctrl-C does.
signal.signal(signal.SIGINT, signal.default_int_handler)
