"""Fixtures and helpers that all tests share."""

from __future__ import annotations
