"""Equality is the test: the same answers from the express lane and from Flask, and from our worker and gunicorn's own.

    corpus*.py  ─ bytes ─▶  wire.py  ◀─▶  servers.py: HeadraceWorker, gevent, gthread, sync
                               │                      each with apps.py (express, by_flask) and plain.py
                            Record ─▶ differences.py: what may differ, and why

`test_workers.py` compares the workers, `test_lanes.py` the lanes, `test_splits.py` whole requests with split ones,
`test_fuzz.py` whatever chance makes of the corpus. A difference is a bug, or stands in `differences.py`.
"""
