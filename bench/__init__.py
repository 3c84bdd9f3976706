"""Side by side with peers, on this machine: ``python -m bench`` runs all of it."""
