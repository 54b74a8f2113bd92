"""The strict reading of what servers say, by which everything here is compared."""

from __future__ import annotations

import pytest

from tests.equality.wire import split

COUNTED = b"HTTP/1.1 200 OK\r\nConnection: keep-alive\r\nContent-Length: 2\r\n\r\nok"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\nA\r\n0123456789\r\n0\r\n\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
NONE = b"HTTP/1.1 204 No Content\r\nConnection: keep-alive\r\n\r\n"
TO_THE_END = b"HTTP/1.0 200 OK\r\nConnection: close\r\n\r\nall of it"


def test_answers_are_told_apart_whatever_ends_them() -> None:
    answers, rest = split(CONTINUE + COUNTED + CHUNKED + NONE + TO_THE_END, True)
    assert rest == b""
    assert [answer.status for answer in answers] == [100, 200, 200, 204, 200]
    assert [answer.framing for answer in answers] == ["none", "length", "chunked", "none", "end"]
    assert [answer.body for answer in answers] == [b"", b"ok", b"ok0123456789", b"", b"all of it"]
    assert not any(answer.cut for answer in answers)


@pytest.mark.parametrize("whole", [COUNTED, CHUNKED, CONTINUE, NONE])
def test_an_answer_is_none_until_it_is_complete(whole: bytes) -> None:
    for at in range(len(whole)):
        assert split(whole[:at], False) == ([], whole[:at])
    assert split(whole, False)[1] == b""


@pytest.mark.parametrize("whole", [COUNTED, CHUNKED])
def test_an_answer_that_breaks_off_is_called_cut(whole: bytes) -> None:
    begin = whole.index(b"\r\n\r\n") + 5
    for at in range(begin, len(whole)):
        (answer,), rest = split(whole[:at], True)
        assert (answer.cut, rest) == (True, b"")


def test_an_answer_to_head_has_no_body_but_a_length() -> None:
    head = COUNTED[:-2]
    assert [answer.framing for answer in split(head + COUNTED, False, (0,))[0]] == ["none", "length"]
    assert [answer.framing for answer in split(head + COUNTED, True)[0]] == ["none", "length"]
    assert [answer.framing for answer in split(head, True)[0]] == ["none"]


@pytest.mark.parametrize(
    "wrong",
    [
        b"HTTP/1.1 2000 OK\r\n\r\n",
        b"HTTP/1.1 None\r\n\r\n",
        b"HTTP/1.1 200 OK\nA: b\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA : b\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n folded\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA: b\nc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: +2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2;x\r\nok\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok!\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nA: b\r\n\r\n",
        b"nonsense",
    ],
)
def test_what_is_not_http_is_left_as_rest(wrong: bytes) -> None:
    answers, rest = split(COUNTED + wrong, True)
    assert (len(answers), rest) == (1, wrong)
