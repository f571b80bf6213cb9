"""Data: tokenizers, the arithmetic curriculum, files of rows and of tokens, and batches of them."""
