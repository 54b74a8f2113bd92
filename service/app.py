"""The application factory: an `HttpServer` with the built-in routes, one blueprint per concern."""

from __future__ import annotations

import os

from service.blueprints import echo, generate, health, models, score
from service.client import PoolClient
from service.config import Settings
from service.connect import LazyClient
from service.server import HttpServer
from service.version import runtime_version


def create_app(client: PoolClient | None = None) -> HttpServer:
    """The application. Without a client it connects to the pool on the first use in each process."""
    settings = Settings.from_env(os.environ)
    server = HttpServer(body_limit=settings.body_limit)
    pool: PoolClient = client if client is not None else LazyClient()
    server.register_blueprint(health.blueprint(pool, runtime_version()))
    server.register_blueprint(echo.blueprint())
    server.register_blueprint(score.blueprint(pool))
    server.register_blueprint(generate.blueprint(pool))
    server.register_blueprint(models.blueprint(pool))
    return server
