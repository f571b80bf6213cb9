"""Measuring models: exact match of answers, perplexity of texts, loss by position."""
