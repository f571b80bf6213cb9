"""Measuring models: exact match of generated answers."""
