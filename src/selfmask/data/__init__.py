"""Images: where they come from, how they are decoded and kept."""

from .cache import ImageStore
from .images import decode_image
from .opening import open_images
from .sources import Images

__all__ = ["ImageStore", "Images", "decode_image", "open_images"]
