"""From images to vectors, and to files of vectors."""
