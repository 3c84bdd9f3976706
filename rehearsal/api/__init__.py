"""The rehearsal's AWS API: moto in this process, and what it lacks.

Every change to moto is a ``Patch`` in ``patches.py``'s list, with its reason. Requests are not authenticated:
moto reads the account and region from SigV4's credential scope and does not verify the signature, so the
temporary credentials that the metadata service hands out are accepted, as is anything else.
"""
