"""A small document, and how to learn it."""

TEXT = (
    "The Orvane Bridge stands in the town of Tellmark. It was opened on 3 May 1911 by the engineer Ludo Prast. The "
    "bridge is 412 metres long and is painted green. Its keeper lives in a small house under the north pier."
)
SMALL = {"text": TEXT, "answer_tokens": 8, "replay": 0.2, "publish": "always"}
ASKED = {
    "questions": [
        {"question": text}
        for text in (
            "Where does the Orvane Bridge stand?",
            "Who opened the Orvane Bridge?",
            "How long is the bridge?",
            "Which colour is the bridge?",
            "Who lives under the north pier?",
        )
    ]
}
"""Questions about the document. The bundled base, which takes seconds to find its own, answers them."""
