"""Agents with an OpenAI client: the executor, and the ways to run one (a function, a command, a service behind a URL)."""
