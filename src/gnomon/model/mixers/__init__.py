"""Mixers along time, one file per kind: each defines `Mixer`. A new kind is a new file here or a dotted path."""
