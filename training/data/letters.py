"""Short letters: to whom, about what, and the same a little longer or shorter."""

from __future__ import annotations

import random

from training.data.memories import one

_TO = "grandmother grandfather mother father aunt uncle sister brother teacher neighbour friend cousin boss doctor".split()
_HE = frozenset("grandfather father uncle brother".split())
_SHE = frozenset("grandmother mother aunt sister".split())
_THANKS = (
    "the cake | the flowers | the book | the scarf | the lovely dinner | the help | the warm socks | the present | the photos | the chocolate | the long talk | the jam | the tea"
).split(" | ")
_INVITES = (
    "to my birthday party | to dinner on Sunday | to a walk in the park | to the concert on Friday | to tea tomorrow | to our garden party | to the cinema | to a picnic"
).split(" | ")
_SORRY = (
    "that I was late | that I forgot the birthday | that I broke the cup | that I did not call | that I was so loud | that I lost the book | that I could not come"
).split(" | ")
_GREETINGS = (
    "Happy birthday | Merry Christmas | A happy new year | Good luck with the exam | Get well soon | Congratulations".split(
        " | "
    )
)
_ENDS = ("With love", "Kind regards", "Best wishes", "Yours", "Warm regards")
_MORE = (
    "I think of you often.", "I hope you are well.", "I hope to see you soon.", "Everything is fine here.", "The weather is lovely at the moment.", "Please write back when you have time.", "I wish you a wonderful week.",
)  # fmt: skip


def thread(rng: random.Random) -> list[str]:
    """Turns from the wish to write to somebody to the letter, and on."""
    to = rng.choice(_TO)
    them = "him" if to in _HE else "her" if to in _SHE else "them"
    asked = one(
        rng,
        "Can you help me write a letter to my {t}? | Help me write an email to my {t}. | I have to write an email to my {t}. | I want to write a letter to my {t}. | Help me write to my {t}, please. | I need a letter to my {t}. | Please help me with a message to my {t}. | "
        "I have to write a card to my {t}. | Could you help me with a card for my {t}? | I would like to write to my {t}. Can you help me?",
        t=to,
    )
    reply = one(
        rng,
        "Of course! What would you like to say to {m}? | Gladly! What do you want to tell {m}? | Sure. What is the letter about? | I'd be glad to help. What would you like to write?",
        m=them,
    )
    wish, body, longer = _content(rng, them)
    end = rng.choice(_ENDS)
    address = f"Dear {to.capitalize()},"
    letter = f"{address}\n{body}\n{end}"
    turns = [asked, reply, wish, letter]
    if rng.random() < 0.15:
        turns = [f"{asked} {wish}", letter]
    if rng.random() < 0.6:
        more = " ".join((longer, *rng.sample(_MORE, rng.choice((1, 2)))))
        turns += [
            one(rng, "Make it longer. | A bit longer, please. | Can you make it longer? | Please add something. | It should be longer. | Write a little more. | Make it a bit longer, please."),
            f"{address}\n{body} {more}\n{end}",
        ]  # fmt: skip
        if rng.random() < 0.3:
            turns += [one(rng, "Shorter, please. | That is too long. | Now shorter again. | Make it short again."), letter]
    elif rng.random() < 0.4:
        name = rng.choice("Anna Ben Clara Emma Felix Hugo Mia Paul Rosa Sam Tom Vera".split())
        turns += [one(rng, "Sign it with {n}. | Put my name under it: {n}. | My name is {n}. Please sign it.", n=name), f"{address}\n{body}\n{end},\n{name}"]  # fmt: skip
    return turns


# What a letter may be about: things, how the user asks, how the letter says it, and a sentence that goes on.
_CONTENTS = (
    (
        _THANKS,
        "I want to say thank you for {x}. | I'd like to thank {m} for {x}. | Say thank you for {x}. | Thank {m} for {x}, please. | It is a thank-you letter for {x}.",
        "Thank you very much for {x}. | Many thanks for {x}! | I want to thank you for {x}.",
        "It made me very happy.",
    ),
    (
        _INVITES,
        "I want to invite {m} {x}. | Invite {m} {x}, please. | It is an invitation {x}. | I'd like {m} to come {x}.",
        "I would like to invite you {x}. | Please come {x}! | You are invited {x}.",
        "It will be a nice time, and I would be glad if you came.",
    ),
    (
        _SORRY,
        "I want to say sorry {x}. | Tell {m} {x} and that I am sorry. | I am sorry {x}.",
        "I am sorry {x}. | I am very sorry {x}. Please forgive me.",
        "It will not happen again.",
    ),
    (
        (
            "I am ill today",
            "I cannot come today",
            "I will be late today",
            "I need a day off",
            "I have a cold",
            "my train is late",
        ),
        "I want to say that {x}. | {x}. | Tell {m} that {x}. | Please write that {x}.",
        "I am sorry, but {x}. | I have to tell you that {x}.",
        "I hope to be back soon.",
    ),
)


def _content(rng: random.Random, them: str) -> tuple[str, str, str]:
    """What the user wants to say, how the letter says it, and a sentence that goes on."""
    kind = rng.randrange(len(_CONTENTS) + 1)
    if kind < len(_CONTENTS):
        things, wishes, texts, ending = _CONTENTS[kind]
        thing = rng.choice(things)
        return one(rng, wishes, x=thing, m=them), one(rng, texts, x=thing), ending
    thing = rng.choice(_GREETINGS)
    wish = one(rng, "I want to write: {x}. | Just say: {x}. | It should say: {x}.", x=thing[0].lower() + thing[1:])
    return wish, f"{thing}!", "I wish you all the best."
