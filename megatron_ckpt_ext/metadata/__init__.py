"""Prepared metadata: the file, its slices, its fingerprint, and layout comparison. No collectives anywhere."""
