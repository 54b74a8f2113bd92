"""gunicorn -c gunicorn.conf.py: Headrace with its embedded pool. Settings given below win over the defaults."""

from service.gunicorn_conf import *  # noqa: F403
