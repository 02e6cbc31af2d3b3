"""What an agent's loop works with: the processes, the thread and the folder that were there before it."""

from __future__ import annotations

from dataclasses import dataclass

from elaunch.agent.config import AgentConfig
from elaunch.agent.forkserver.client import ForkServer
from elaunch.agent.guardian.client import GuardianClient
from elaunch.agent.output.pump import Pump
from elaunch.agent.output.run_dir import RunDir


@dataclass(frozen=True)
class Services:
    """One agent's services; `run.begin` starts and ends them."""

    config: AgentConfig
    guardian: GuardianClient
    fork_server: ForkServer
    pump: Pump
    run_dir: RunDir
