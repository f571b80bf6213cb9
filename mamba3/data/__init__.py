"""Data: tokenizers, the arithmetic curriculum, prompt/completion files, and batches of them."""
