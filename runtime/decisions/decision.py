"""A decision of a plan, the files beside it, and the dispatch models under which it can be carried out."""

import hashlib
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer

from ...errors import InputError
from ...files import size_of
from ...profilers.cluster import Cluster
from ...solvers import ports
from ...traces.model import ModelSpec

MAX_SIDECAR_BYTES = 2**30
DispatchModel = ports.DispatchModel
DISPATCH_MODELS: tuple[DispatchModel, ...] = get_args(DispatchModel)
TRAINED: frozenset[DispatchModel] = frozenset({"standard", "migrating"})  # under which gradients flow
WIRED: DispatchModel = "standard"  # under which hidden vectors travel in another form
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Layer = Annotated[int, Field(ge=0)]


class Record(BaseModel):
    """A part of the plan: frozen, strict about keys, finite numbers only."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, ser_json_inf_nan="constants")


class SidecarFile(Record):
    """A file beside the plan, known by its hash; `file` is a plain name."""

    file: str = Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}$")
    sha256: Sha256

    @classmethod
    def of(cls, kind: str, contents: bytes) -> Self:
        """Name a file by its kind and its contents."""
        sha256 = hashlib.sha256(contents).hexdigest()
        return cls(file=f"{kind}-{sha256[:16]}.safetensors", sha256=sha256)

    def read(self, folder: Path) -> bytes:
        """Read the file in the folder of its plan.

        Raises
        ------
        InputError
            It is not there, too large, or another file than the plan names.
        """
        path = folder / self.file
        advice = "the plan needs it beside it: copy it there, or run moeplan solve again"
        if not path.exists():
            raise InputError(f"{path}: is not there; {advice}")
        if (size := size_of(path, what="a file of the plan")) > MAX_SIDECAR_BYTES:
            raise InputError(f"{path}: {size:,} bytes, expected at most {MAX_SIDECAR_BYTES:,}; {advice}")
        contents = path.read_bytes()
        if (sha256 := hashlib.sha256(contents).hexdigest()) != self.sha256:
            raise InputError(f"{path}: has hash {sha256[:12]}.., not {self.sha256[:12]}..; {advice}")
        return contents


class Decision(Record):
    """A decision of a plan, which holds at most one of each kind."""

    key: ClassVar[str]  #: The name of the kind in a plan
    #: Those under which the decision can be carried out; a plan that names none gets the first that suits all
    dispatch_models: ClassVar[tuple[DispatchModel, ...]] = DISPATCH_MODELS
    #: Fields that are not written where they are None: plans without them keep their hash
    unwritten: ClassVar[tuple[str, ...]] = ()

    @model_serializer(mode="wrap")
    def _without_absent(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in write(self).items() if value is not None or name not in self.unwritten}

    def check(self, model: ModelSpec, cluster: Cluster, /) -> None:
        """Refuse a decision that does not fit the plan's model or cluster.

        Raises
        ------
        InputError
            What does not fit.
        """
