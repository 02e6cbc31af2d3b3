"""Posts the job's progress to Kubeflow Trainer's status server, as "TrainJob Progress" in its user guide specifies.

Kubeflow Trainer 2.2 sets the variables if its feature gate TrainJobStatus is on (its proposal KEP-2779).
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial
from http.client import HTTPException, HTTPSConnection
from pathlib import Path
from ssl import create_default_context
from typing import Any
from urllib.parse import urlsplit

from elaunch.agent.linux import start_thread

# The server's URL, and the files of its certificate authority and of the token.
VARIABLES = ("KUBEFLOW_TRAINER_SERVER_URL", "KUBEFLOW_TRAINER_SERVER_CA_CERT", "KUBEFLOW_TRAINER_SERVER_TOKEN")
# The guide asks for five seconds or more between two posts.
EVERY_S = 5.0
_POST_S = 5.0
_CLOSE_S = 2.0
# The field is an int32.
_SECONDS_MAX = (1 << 31) - 1


class ProgressPoster:
    """Posts progress at most every EVERY_S, and the last step, each in a thread. Only the first failure is logged."""

    def __init__(self, environ: Mapping[str, str], warn: Callable[[str], None]) -> None:
        self._url, self._ca_cert, self._token = (environ[name] for name in VARIABLES)
        self._warn = warn
        self._has_warned = self._has_ended = False
        self._next_s = 0.0
        self._thread: threading.Thread | None = None

    def observe(self, event: str, fields: Mapping[str, Any], now_s: float) -> None:
        """Post the progress in an event of the timeline, if it has a total. Never waits."""
        # All nodes are at the same step, and one posts: not the leader, which may be a spare without workers.
        if event != "progress" or fields["first_rank"] != 0 or not (total := fields.get("total")):
            return
        step, steps_per_s = min(max(fields["steps"]), total), fields.get("steps_per_s")
        is_early = now_s < self._next_s or (self._thread and self._thread.is_alive())
        if is_early and (step < total or self._has_ended):
            return
        self._has_ended = step == total
        self._next_s = now_s + EVERY_S
        status: dict[str, object] = {"progressPercentage": 100 * step // total}
        if steps_per_s or step == total:
            status["estimatedRemainingSeconds"] = min(round((total - step) / (steps_per_s or 1)), _SECONDS_MAX)
        self._thread = start_thread(partial(self._post, status), "elaunch-kubeflow")

    def close(self) -> None:
        """Wait a moment for the last post."""
        if self._thread:
            self._thread.join(_CLOSE_S)

    def _post(self, status: dict[str, object]) -> None:
        status["lastUpdatedTime"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        try:
            place = urlsplit(self._url)
            # Kubernetes replaces the token and the certificate from time to time.
            token, context = Path(self._token).read_text().split(), create_default_context(cafile=self._ca_cert)
            headers = {"Authorization": f"Bearer {''.join(token)}", "Content-Type": "application/json"}
            with closing(HTTPSConnection(place.netloc, timeout=_POST_S, context=context)) as connection:
                connection.request("POST", place.path, json.dumps({"trainerStatus": status}), headers)
                response = connection.getresponse()
            if response.status != 200:
                raise OSError(f"HTTP {response.status} {response.reason}")
        except (OSError, HTTPException, ValueError) as error:
            if not self._has_warned:
                self._has_warned = True
                self._warn(f"progress cannot be posted to {self._url} ({error}); the job continues")
