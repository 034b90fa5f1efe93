"""What a failed read or write means, and what a person can do about it."""

from __future__ import annotations

import errno

_DEAD = "The drive, or the way to it, is failing: look into the kernel's log (dmesg) and check the drive"
_ADVICE = {
    errno.ENOSPC: "Free space on that drive",
    errno.EDQUOT: "Free space there, or raise the quota",
    errno.EROFS: "The file system became read-only, mostly after an error of the drive: look into the kernel's log "
    "(dmesg), mend it and mount it again",
    errno.EIO: _DEAD,
    errno.ENXIO: _DEAD,
    errno.ENODEV: _DEAD,
    errno.EREMOTEIO: _DEAD,
    errno.ENOTCONN: _DEAD,
    errno.ESTALE: _DEAD,
    errno.ENOENT: "Somebody removed the file while it was in use",
    errno.EACCES: "Somebody changed the rights of the file",
}


def explain(cause: OSError) -> str:
    """Return the system's words with the name of the error, and what to do."""
    code = cause.errno or 0
    text = f"{cause.strerror or cause} ({errno.errorcode.get(code, f'error {code}')})"
    advice = _ADVICE.get(code)
    return text if advice is None else f"{text}. {advice}; generations committed before are untouched"
