"""Whatever text goes in is text when it comes out, never markup."""

from html.parser import HTMLParser

from hypothesis import given
from hypothesis import strategies as st

from bayeszip.errors import printable
from bayeszip.report.markup import Markup, element, join


class Seen(HTMLParser):
    """The tags, attributes and text that a browser would find."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.tags, self.text = [], ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data


@given(st.text(), st.text())
def test_text_comes_back_as_text(content, title):
    seen = Seen(element("p", content, title=title))
    assert seen.tags == [("p", {"title": printable(title)})]
    assert seen.text == printable(content)


def test_markup_stays_markup_and_nothing_stays_nothing():
    assert element("p", element("b", "x"), None, 3) == "<p><b>x</b>3</p>"
    assert element("meta", charset="utf-8") == '<meta charset="utf-8">'
    assert join([Markup("<i>"), "<i>"], "-") == "<i>-&lt;i&gt;"


def test_coordinates_are_short():
    assert element("g", x=1.0, y=0.123456, width=-1e-9) == '<g x="1" y="0.12" width="0"></g>'
