"""Reinforcement learning: observers play, an agent chooses every action by RPC and learns from all their games.

elaunch --role agent=1,observer=2 reinforce.py --rounds 50

The environment is a pole on a cart. The agent's Keeper has the policy. The observers have no state: a round begins
anew if a process dies in it, with the same games.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import sys
from dataclasses import dataclass, field

import torch
from joined import joined, names
from torch import Tensor, nn
from torch.distributed import rpc

from elaunch.trainer import Keeper

STEPS_MAX = 100


@dataclass
class Pole:
    """A cart with a pole (Barto, Sutton and Anderson, 1983): keep the pole up by pushing to the left or the right."""

    state: list[float]

    def push(self, right: bool) -> bool:
        """One fiftieth of a second. Returns whether the pole stands, and the cart is on its track."""
        x, speed, angle, turn = self.state
        force = 10.0 if right else -10.0
        sine, cosine = math.sin(angle), math.cos(angle)
        common = (force + 0.05 * turn * turn * sine) / 1.1
        turning = (9.8 * sine - cosine * common) / (0.5 * (4 / 3 - 0.1 * cosine * cosine / 1.1))
        moving = common - 0.05 * turning * cosine / 1.1
        self.state = [x + 0.02 * speed, speed + 0.02 * moving, angle + 0.02 * turn, turn + 0.02 * turning]
        return abs(self.state[0]) < 2.4 and abs(self.state[2]) < math.radians(12)


@dataclass
class Agent:
    """The policy. It remembers this round's games: for each action the state, and whether it went to the right."""

    policy: nn.Module
    games: dict[str, list[tuple[list[float], bool]]] = field(default_factory=dict)
    dice: dict[str, torch.Generator] = field(default_factory=dict)

    def begin(self, round_: int, observers: list[str]) -> None:
        self.games = {name: [] for name in observers}
        seeds = {name: 1000 * round_ + number for number, name in enumerate(observers)}
        self.dice = {name: torch.Generator().manual_seed(seed) for name, seed in seeds.items()}

    def choose(self, observer: str, state: list[float]) -> bool:
        """Runs in a thread of RPC's for each observer; the result does not depend on their order."""
        with torch.no_grad():
            probability = torch.sigmoid(self.policy(torch.tensor(state)))
        right = bool(torch.rand(1, generator=self.dice[observer]) < probability)
        self.games[observer].append((state, right))
        return right

    def loss(self) -> Tensor:
        """REINFORCE: what came before a long rest of a game becomes more likely."""
        games = [self.games[name] for name in sorted(self.games)]
        states, rights = (torch.tensor([move[part] for game in games for move in game]) for part in (0, 1))
        rests = torch.cat([torch.arange(len(game), 0, -1.0) for game in games])
        chances = torch.sigmoid(self.policy(states))[:, 0]
        logs = torch.where(rights, chances, 1 - chances).log()
        return -(logs * (rests - rests.mean()) / (rests.std() + 1e-6)).sum()


def play(agent: rpc.RRef[Agent], round_: int) -> int:
    """Runs in an observer: one game. Returns how long the pole stood."""
    me = rpc.get_worker_info().name
    generator = torch.Generator().manual_seed(round_)
    pole = Pole((0.1 * torch.rand(4, generator=generator) - 0.05).tolist())
    length = 1
    while pole.push(agent.rpc_sync().choose(me, pole.state)) and length < STEPS_MAX:
        length += 1
    return length


def learn(observers: list[str], args: argparse.Namespace) -> None:
    """The agent's loop."""
    torch.manual_seed(0)
    policy = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    agent = Agent(policy)
    me: rpc.RRef[Agent] = rpc.RRef(agent)
    # A snapshot after each round: nobody else has the policy.
    with Keeper(policy, optimizer, name="agent", per_rank=(), lose_at_most=0, checkpoints=args.checkpoints) as keeper:
        for round_ in keeper.steps(args.rounds):
            agent.begin(round_, observers)
            games = [rpc.rpc_async(name, play, args=(me, round_)) for name in observers]
            lengths = torch.futures.wait_all(games)
            agent.loss().backward()
            with keeper.commit():
                optimizer.step()
                optimizer.zero_grad()
            if round_ % 10 == 0:
                print(f"step {round_}: the poles stood for {lengths}", flush=True)
    digest = hashlib.sha256(b"".join(parameter.detach().numpy().tobytes() for parameter in policy.parameters()))
    print(f"parameters {digest.hexdigest()[:12]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--checkpoints", default="checkpoints-agent")
    args = parser.parse_args()
    role = os.environ["ROLE_NAME"]
    if role not in ("agent", "observer"):
        sys.exit("start it with --role agent=1,observer=2")
    # An observer only answers: `joined` waits until the agent is done too.
    with joined(follows=role == "observer"):
        if role == "agent":
            learn(names("observer"), args)


if __name__ == "__main__":
    main()
