"""Records of the pipeline: one frozen dataclass per artifact, standard library only.

The rooms exchange these records and nothing else. Each record has one writer (see the table in
``docs/map.md``) and is stored as canonical JSON, so that equal content is equal bytes.
"""

from eyas.contracts.capture import (
    CaptureIdentity,
    CapturePlan,
    EngineFacts,
    FailedSample,
    PlannedSample,
    PlannedShard,
    ShardEntry,
    ShardManifest,
    StoredSample,
    payload_bytes,
)
from eyas.contracts.data import (
    BYTES_PER_MASK,
    BYTES_PER_STATE,
    BYTES_PER_TOKEN_ID,
    SCHEMA_VERSION,
    Answer,
    Conversation,
    FileDigest,
    FinalHidden,
    FinalNorm,
    LastRows,
    Split,
    TargetIdentity,
    TokenReport,
    TokenSample,
)
from eyas.contracts.drafter import (
    AcceptanceReport,
    CheckpointMeta,
    DecodeCheck,
    DrafterShape,
    ExportMeta,
    RopeScaling,
    SetAcceptance,
)

__all__ = [
    "BYTES_PER_MASK",
    "BYTES_PER_STATE",
    "BYTES_PER_TOKEN_ID",
    "SCHEMA_VERSION",
    "AcceptanceReport",
    "Answer",
    "CaptureIdentity",
    "CapturePlan",
    "CheckpointMeta",
    "Conversation",
    "DecodeCheck",
    "DrafterShape",
    "EngineFacts",
    "ExportMeta",
    "FailedSample",
    "FileDigest",
    "FinalHidden",
    "FinalNorm",
    "LastRows",
    "PlannedSample",
    "PlannedShard",
    "RopeScaling",
    "SetAcceptance",
    "ShardEntry",
    "ShardManifest",
    "Split",
    "StoredSample",
    "TargetIdentity",
    "TokenReport",
    "TokenSample",
    "payload_bytes",
]
