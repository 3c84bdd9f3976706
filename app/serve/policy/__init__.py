"""What a replica decides before and between its engine's steps: predicted cost, queue, prefill or decode.

Pure: no engine, no HTTP, no clock of its own. Admission, the transformers-neuronx scheduler, the emulated
engine and the simulation use the same objects.
"""
