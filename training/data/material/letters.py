"""Short letters with a recipient and a subject, then made longer or shorter."""

from __future__ import annotations

import random

from training.data.material.table import Table, phrase

_TABLE = Table("letters")

_TO = _TABLE["to"]
_HE = frozenset(_TABLE["he"])
_SHE = frozenset(_TABLE["she"])
_GREETINGS = _TABLE["greetings"]
_ENDS = _TABLE["ends"]
_MORE = _TABLE["more"]


def thread(rng: random.Random) -> list[str]:
    """Return the turns from the wish to write to somebody, to the letter and its changes."""
    to = rng.choice(_TO)
    them = "him" if to in _HE else "her" if to in _SHE else "them"
    asked = _TABLE.say(rng, "can_you_help_me", t=to)
    reply = _TABLE.say(rng, "of_course_what_would", m=them)
    wish, body, longer = _content(rng, them)
    end = rng.choice(_ENDS)
    address = f"Dear {to.capitalize()},"
    letter = f"{address}\n{body}\n{end}"
    turns = [asked, reply, wish, letter]
    if rng.random() < 0.15:
        turns = [f"{asked} {wish}", letter]
    if rng.random() < 0.6:
        more = " ".join((longer, *rng.sample(_MORE, rng.choice((1, 2)))))
        turns += [_TABLE.say(rng, "make_it_longer"), f"{address}\n{body} {more}\n{end}"]
        if rng.random() < 0.3:
            turns += [_TABLE.say(rng, "shorter_please"), letter]
    elif rng.random() < 0.4:
        name = rng.choice(_TABLE["signers"])
        turns += [_TABLE.say(rng, "sign_it_with", n=name), f"{address}\n{body}\n{end},\n{name}"]
    return turns


_CONTENTS = _TABLE["contents"]


def _content(rng: random.Random, them: str) -> tuple[str, str, str]:
    """Return what the user wants to say, how the letter says it, and a sentence for a longer letter."""
    kind = rng.randrange(len(_CONTENTS) + 1)
    if kind < len(_CONTENTS):
        content = _CONTENTS[kind]
        thing = rng.choice(content["things"])
        return phrase(rng, content["wishes"], x=thing, m=them), phrase(rng, content["texts"], x=thing), content["ending"]
    thing = rng.choice(_GREETINGS)
    wish = _TABLE.say(rng, "i_want_to_write", x=thing[0].lower() + thing[1:])
    return wish, f"{thing}!", "I wish you all the best."
