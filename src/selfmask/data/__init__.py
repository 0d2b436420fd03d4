"""Images: where they come from, how they are decoded and kept."""

from .cache import ImageStore
from .images import decode_image
from .opening import open_images
from .sources import Images, SomeImages
from .splits import label_split

__all__ = ["ImageStore", "Images", "SomeImages", "decode_image", "label_split", "open_images"]
