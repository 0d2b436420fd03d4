"""Every error a user can meet: what happened, what was expected, what was found, what to do next."""

import errno

from .plain import plain


class SelfmaskError(Exception):
    """Base of all our errors: `except SelfmaskError` catches everything we raise on purpose.

    What it says of files (names, notes, reasons) is safe to print; the parts it was made of are kept as they are.
    """

    of_main = False
    """Whether this is another process's error, which the main one tells."""

    def __init__(self, what: str, *, expected: object = None, found: object = None, todo: str | None = None) -> None:
        self.what, self.expected, self.found, self.todo = what, expected, found, todo
        lines = [_part(what)]
        if expected is not None:
            lines.append(f"  expected: {_part(expected)}")
        if found is not None:
            lines.append(f"  found:    {_part(found)}")
        if todo is not None:
            lines.append(f"  do:       {_part(todo)}")
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[object, ...]:
        # The default would call __init__ with the rendered text only, and workers send errors home by pickle.
        return _rebuild, (type(self), self.what, self.expected, self.found, self.todo), self.__dict__


def _part(value: object) -> str:
    """As it is printed; further lines stand below the first, so that none of them looks like one of ours."""
    first, *others = plain(value, keep="\n").split("\n")
    return "\n".join([first, *(" " * 12 + line.strip() for line in others)])


def _rebuild(kind: type[SelfmaskError], what: str, expected: object, found: object, todo: str | None) -> SelfmaskError:
    return kind(what, expected=expected, found=found, todo=todo)


class ConfigError(SelfmaskError, ValueError):
    """A setting that cannot work."""


class SelectionError(ConfigError):
    """The selection names no weight, or a weight that cannot carry a mask."""


class UnknownMaskError(SelfmaskError, KeyError):
    """No mask of that name is loaded."""

    __str__ = Exception.__str__  # KeyError would show the repr of the text, without its line breaks


class MaskFileError(SelfmaskError):
    """Something is wrong with a mask file; every error of reading or writing one is of this kind."""


class NotAMaskFileError(MaskFileError):
    """The file is no safetensors file, or no mask file, or not a file at all."""


class CorruptMaskFileError(MaskFileError):
    """The file is a mask file, but damaged: truncated, altered, or made to mislead."""

    def __init__(
        self,
        what: str,
        *,
        expected: object = "a mask file written by save_pretrained",
        found: object = "something else",
        todo: str | None = "download the file again, or save the mask again",
    ) -> None:
        super().__init__(what, expected=expected, found=found, todo=todo)


class CorruptCascadeError(CorruptMaskFileError):
    """The file is a cascade file, but damaged, or made to mislead."""


class UnsupportedVersionError(MaskFileError):
    """The file is of a format version, or uses a codec, that this release does not know."""


class WrongBaseError(MaskFileError):
    """The mask was learned on another backbone, or on other weights of the same backbone."""


class RelativeMaskError(MaskFileError):
    """The file stores only the difference to another mask, and that mask is not at hand."""


class DifferentMasksError(MaskFileError):
    """Masks that do not fit each other: of different weights, or applied in different ways."""


class OversizedImagesError(MaskFileError):
    """The file calls for images so large that they could fill any memory, and nobody else asked for them."""


class BaseWarning(UserWarning):
    """A base that could be checked only in part (a file of an earlier format), or whose tables are not as they were."""


class DirectCallWarning(UserWarning):
    """The base of a masked model was called by itself, where its mask does nothing."""


class MaskWriteError(MaskFileError, OSError):
    """The file could not be written; what stood there before is untouched."""

    __str__ = Exception.__str__


class EvaluationError(SelfmaskError):
    """Features that cannot be evaluated, or a way to evaluate them that cannot work."""


class LabelsError(SelfmaskError):
    """Labels that cannot be learned from or measured with: missing, of one class, or not fitting their images."""


class FeatureMapError(SelfmaskError):
    """A map of vectors that cannot be read, or was fitted to other vectors."""


class EmbedderError(SelfmaskError):
    """What was given to make vectors with is no run folder, no mask on its backbone, or not finished."""


class FeaturesWriteError(SelfmaskError, OSError):
    """The file of vectors could not be written; what stood there before is untouched, finished parts are kept."""

    __str__ = Exception.__str__


class CollectionError(SelfmaskError):
    """Something is wrong with a collection of images; every error of reading or building one is of this kind."""


class CorruptCollectionError(CollectionError):
    """The folder is a collection, but damaged: cut short, altered, or made to mislead."""

    def __init__(
        self,
        what: str,
        *,
        expected: object = "a collection that `selfmask index` made",
        found: object = None,
        todo: str | None = "copy the folder again, or index the images again",
    ) -> None:
        super().__init__(what, expected=expected, found=found, todo=todo)


class UnknownItemError(CollectionError, KeyError):
    """The collection has no image, or no plane, of that number; or there is no collection."""

    __str__ = Exception.__str__


class CollectionWriteError(CollectionError, OSError):
    """The collection could not be written; finished work is kept, and the same command goes on from there."""

    __str__ = Exception.__str__


class DataError(SelfmaskError):
    """Something is wrong with the images that were given; every error of finding or reading them is of this kind."""


class NoImagesError(DataError):
    """Nothing to read there: no such place, or no image in it."""


class ImagesChangedError(DataError):
    """Images were written over while they were in use."""


class BadImageError(DataError):
    """One image that cannot be read; `found` says why."""


class TooManyBadImagesError(DataError):
    """So many images cannot be read that the rest may not be what was meant; `bad` has the name and reason of each."""

    def __init__(
        self,
        what: str,
        *,
        expected: object = None,
        found: object = None,
        todo: str | None = None,
        bad: list[tuple[str, str]] | None = None,
    ) -> None:
        super().__init__(what, expected=expected, found=found, todo=todo)
        self.bad = bad or []


class MalformedDataError(DataError):
    """A list file, an array file or a data set object that is not of the form we read."""


class UnknownDataError(DataError):
    """No data set of that name."""


class DataUnavailableError(DataError):
    """The data set is known, but it is not on this machine and could not be fetched."""


class BackboneError(SelfmaskError):
    """Every error of naming or loading a backbone is of this kind."""


class UnknownBackboneError(BackboneError, KeyError):
    """No backbone of that name."""

    __str__ = Exception.__str__


class NotABackboneError(BackboneError):
    """A network that does not map images to one vector each."""


class NoTextTowerError(BackboneError):
    """A backbone that cannot read: only CLIPs have a text tower."""


class WeightsUnavailableError(BackboneError):
    """The backbone is known, but its weights are not on this machine and could not be fetched."""


class BadWeightsError(BackboneError):
    """A weights file that cannot be read, or that is of another network."""


class MissingExtraError(SelfmaskError, ImportError):
    """A package that only some uses need is not installed."""

    __str__ = Exception.__str__


class RunError(SelfmaskError):
    """Something is wrong with a run or its folder; every error of training is of this kind."""


class RunExistsError(RunError):
    """The folder holds a run already."""


class ForeignFolderError(RunError):
    """The folder holds files, and no run of ours: what we write could take the place of them."""


class RunBusyError(RunError):
    """Another process is writing to this run folder, or to this file of vectors."""


class NoLocksError(RunError):
    """Nothing there can keep two writers apart: the file system, or the machine, has no locks."""


class RunMismatchError(RunError):
    """A run was to be resumed with other settings, other images or another backbone than it began with."""


class RunDamagedError(RunError):
    """A file of the run folder cannot be read."""


class RunWriteError(RunError, OSError):
    """A file of the run could not be written; the last checkpoint is whole."""

    __str__ = Exception.__str__


class TooFewImagesError(RunError):
    """There are too few different images to learn from."""


class ClusterError(RunError):
    """The images do not fall into clusters that experts can be trained on."""


class ExpertError(RunError):
    """An expert of a cascade is not trained yet, or its file is damaged."""


class JobsError(RunError):
    """Jobs that were given to an engine did not come to their end."""


class NeededCellError(RunError):
    """A cell of a study cannot run, because one that it needs did not come to an end."""


class DivergedRunError(RunError):
    """The loss is not a number any more."""


class InterruptedRunError(RunError):
    """The run was asked to stop, and saved what it had."""


class ExportError(SelfmaskError):
    """Something that cannot be exported, or whose export is not what it was made from."""


class ExportWriteError(ExportError, OSError):
    """The export could not be written; what stood there before is untouched."""

    __str__ = Exception.__str__


class HeadError(SelfmaskError):
    """A head that is missing, damaged, or made for other classes."""


class ServingError(SelfmaskError):
    """A request that cannot be answered; every error of the server is of this kind."""


class FailedError(ServingError):
    """A fault of the server, not of the request: what it was is in its log."""


class BadRequestError(ServingError, ValueError):
    """A request that is not of the form that is expected."""


class NotAllowedError(ServingError):
    """A key is missing, or is not one that opens this."""


class UnknownModelError(ServingError, KeyError):
    """There is no mask of that name in the folder that is served."""

    __str__ = Exception.__str__


class UnusableModelError(ServingError):
    """The file of a mask is there, but it is damaged, or made for another backbone."""


class TakenNameError(ServingError):
    """A mask of that name is there already, or is one that requests cannot change."""


class TooLargeError(ServingError):
    """A request with more bytes or more images than the server takes."""


class BusyError(ServingError):
    """As many images are waiting as the server holds; `after` are the seconds until it is worth trying again."""

    def __init__(
        self,
        what: str,
        *,
        expected: object = None,
        found: object = None,
        todo: str | None = None,
        after: float = 1.0,
    ) -> None:
        super().__init__(what, expected=expected, found=found, todo=todo)
        self.after = after


class LateError(ServingError, TimeoutError):
    """A request was not done by its deadline."""

    __str__ = Exception.__str__


class SlowRequestError(ServingError):
    """A request whose bytes do not come in time."""


class StoppingError(ServingError):
    """The server finishes what it has, and takes no more."""


class HubError(SelfmaskError):
    """Something is wrong with the hub, or what is asked of it; every error of pushing and pulling is of this kind."""


class HubAddressError(HubError, ValueError):
    """A name that can be that of nothing on the hub."""

    __str__ = Exception.__str__


class HubAccessError(HubError):
    """The hub does not know who asks, or does not allow it."""


class HubNotFoundError(HubError):
    """The hub has no such repository, revision or file; or does not show it to who asks."""


class HubUnreachableError(HubError, OSError):
    """The hub does not answer, broke off, or is not to be asked (offline mode)."""

    __str__ = Exception.__str__


class HubFileError(HubError):
    """A file on the hub that is too large, or not what it should be."""


class CardError(HubError):
    """The hub refuses what the model card says."""


def unwritable(error: OSError) -> dict[str, str]:
    """Why something could not be written, and what helps against just that: `found` and `todo` of an error."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        todo = "free some space, then try again (finished work is kept; --resume continues a run)"
    elif error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        todo = "make the folder writable and try again (--resume continues a run), or choose another place"
    else:
        todo = "choose another place"
    return {"found": error.strerror or str(error), "todo": todo}
