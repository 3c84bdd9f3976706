"""The transformers-neuronx engine: continuous batching over the library's static slots.

From the device outwards: :mod:`contract` (what the library's forward call means), :mod:`hardware` and
:mod:`cpu_contract` (who answers it), :mod:`runner` (work -> calls), :mod:`scheduler` (which work next),
:mod:`core` (one step: work, sampling, text), :mod:`engine` (the core's thread, streams), :mod:`api` (HTTP).
"""
