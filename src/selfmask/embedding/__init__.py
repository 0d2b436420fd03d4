"""From images to vectors, and to files of vectors."""

from .vectors import embed, embed_batches

__all__ = ["embed", "embed_batches"]
