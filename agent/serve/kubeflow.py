"""Posts the job's progress to Kubeflow Trainer's status server, as "TrainJob Progress" in its user guide specifies.

Kubeflow Trainer 2.2 sets the variables if its feature gate TrainJobStatus is on (its proposal KEP-2779).
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from http.client import HTTPException
from pathlib import Path
from ssl import create_default_context
from typing import Any
from urllib.request import Request, urlopen

from elaunch.agent.linux import start_thread

# The server's URL, and the files of its certificate authority and of the token.
_VARIABLES = ("KUBEFLOW_TRAINER_SERVER_URL", "KUBEFLOW_TRAINER_SERVER_CA_CERT", "KUBEFLOW_TRAINER_SERVER_TOKEN")
_POST_S = 5.0
_CLOSE_S = 2.0


class ProgressPoster:
    """Posts each progress of the timeline in a thread; nothing unless all variables are set.

    `warn` is called for each post that fails.
    """

    def __init__(self, environ: Mapping[str, str], warn: Callable[[str], object]) -> None:
        self._url, self._ca_cert, self._token = settings = [environ.get(name, "") for name in _VARIABLES]
        self._is_set, self._warn = all(settings), warn
        self._thread: threading.Thread | None = None

    def observe(self, event: str, fields: Mapping[str, Any], now_s: float) -> None:
        """Post the progress in an event of the timeline, if it has a total. Never waits."""
        # All nodes are at the same step, and one posts: not the leader, which may be a spare without workers.
        if not self._is_set or event != "progress" or fields["first_rank"] != 0 or not (total := fields.get("total")):
            return
        left = max(total - max(fields["steps"]), 0)
        status = {"progressPercentage": 100 * (total - left) // total}
        if steps_per_s := fields.get("steps_per_s"):
            status["estimatedRemainingSeconds"] = round(left / steps_per_s)
        self._thread = start_thread(partial(self._post, status), "elaunch-kubeflow")

    def close(self) -> None:
        """Wait a moment for the last post."""
        if self._thread:
            self._thread.join(_CLOSE_S)

    def _post(self, status: Mapping[str, object]) -> None:
        body = {"trainerStatus": {**status, "lastUpdatedTime": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}}
        try:
            # Kubernetes replaces the token and the certificate from time to time.
            token, context = Path(self._token).read_text().strip(), create_default_context(cafile=self._ca_cert)
            headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
            urlopen(Request(self._url, json.dumps(body).encode(), headers), timeout=_POST_S, context=context).close()
        except (OSError, HTTPException, ValueError) as error:
            self._warn(f"progress cannot be posted to {self._url} ({error}); the job continues")
