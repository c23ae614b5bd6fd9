"""The process that talks to the Hugging Face hub: python -m services.loader.hub_client list|fetch

It takes one job as JSON on standard input; `list` answers with JSON. What goes wrong is one line on
standard error and exit code 1. Endpoint, token, proxy and certificates are the hub's own client's;
its download is not used, since a download of it that was broken off starts again from nothing.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

MAX_FRUITLESS = 5  # attempts in a row that brought no byte
FIRST_PAUSE_S = 0.1
STALLED_S = 30.0


def main() -> int:
    """Exit code of the process."""
    job = json.load(sys.stdin)
    try:
        if sys.argv[1] == "list":
            json.dump(list_files(job["repo"], job["revision"]), sys.stdout)
        else:
            for path, num_bytes in job["files"]:
                fetch_file(job["repo"], job["revision"], path, num_bytes, Path(job["folder"]))
    except Exception as error:  # noqa: BLE001  any failure of the client is its caller's one line
        sys.stderr.write("ERROR: " + " ".join(str(error).split()) + "\n")
        return 1
    return 0


def list_files(repo: str, revision: str) -> dict[str, Any]:
    """Commit, and path, size and digest of each file."""
    from huggingface_hub import HfApi

    found = HfApi().model_info(repo, revision=revision, files_metadata=True)
    return {
        "commit": found.sha,
        "files": [
            {
                "path": file.rfilename,
                "num_bytes": file.size,
                "sha256": file.lfs.sha256 if file.lfs else None,
                "blob_sha1": None if file.lfs else file.blob_id,
            }
            for file in found.siblings or ()
        ],
    }


def fetch_file(repo: str, revision: str, path: str, num_bytes: int, folder: Path) -> None:
    """Fetch a file to its path under `folder`, from where an earlier attempt left its `.part`.

    Raises what the client raises, and `OSError` when attempt after attempt brings nothing.
    """
    from huggingface_hub.errors import HfHubHTTPError

    target = folder / path
    part = target.with_name(target.name + ".part")
    target.parent.mkdir(parents=True, exist_ok=True)
    if _size(target) == num_bytes:
        return
    fruitless, why = 0, ""
    while (before := _size(part)) != num_bytes:
        if before > num_bytes:
            part.unlink()
            continue
        try:
            _append(repo, revision, path, part)
        except HfHubHTTPError:
            raise  # it answered, and no other answer is to be had
        except Exception as error:  # noqa: BLE001  a line that broke, in the client's many words
            why = str(error)
        if _size(part) > before:
            fruitless = 0
            continue
        fruitless += 1
        if fruitless == MAX_FRUITLESS:
            raise OSError(f"{path} stops at byte {before} of {num_bytes}: {why or 'no more comes'}")
        time.sleep(FIRST_PAUSE_S * 2**fruitless)
    part.touch()
    part.replace(target)


def _append(repo: str, revision: str, path: str, part: Path) -> None:
    """One request for what the part lacks; what comes before it breaks is kept."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import (  # type: ignore[attr-defined]  # it has no __all__
        build_hf_headers,
        get_session,
        hf_raise_for_status,
    )

    start = _size(part)
    headers = build_hf_headers() | {"Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    url = hf_hub_url(repo, path, revision=revision)
    with (
        get_session().stream(
            "GET", url, headers=headers, follow_redirects=True, timeout=STALLED_S
        ) as answer,
        part.open("ab") as file,
    ):
        hf_raise_for_status(answer)
        given = answer.headers.get("Content-Range", "")
        if start and not given.startswith(f"bytes {start}-"):
            file.truncate(0)  # it sends the whole
        # As it comes in: of pieces of a fixed size the last would be lost with the line.
        for piece in answer.iter_bytes():
            file.write(piece)


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


if __name__ == "__main__":
    sys.exit(main())
