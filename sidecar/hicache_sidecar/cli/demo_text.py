"""Text for the demo: the openings of two novels in the public domain."""

CARROLL = """\
Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do: once or \
twice she had peeped into the book her sister was reading, but it had no pictures or conversations in it, "and what \
is the use of a book," thought Alice "without pictures or conversations?"

So she was considering in her own mind (as well as she could, for the hot day made her feel very sleepy and stupid), \
whether the pleasure of making a daisy-chain would be worth the trouble of getting up and picking the daisies, when \
suddenly a White Rabbit with pink eyes ran close by her.

There was nothing so very remarkable in that; nor did Alice think it so very much out of the way to hear the Rabbit \
say to itself, "Oh dear! Oh dear! I shall be late!" (when she thought it over afterwards, it occurred to her that she \
ought to have wondered at this, but at the time it all seemed quite natural); but when the Rabbit actually took a \
watch out of its waistcoat-pocket, and looked at it, and then hurried on, Alice started to her feet.
"""

DICKENS = """\
It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness, it was \
the epoch of belief, it was the epoch of incredulity, it was the season of Light, it was the season of Darkness, it \
was the spring of hope, it was the winter of despair, we had everything before us, we had nothing before us, we were \
all going direct to Heaven, we were all going direct the other way - in short, the period was so far like the present \
period, that some of its noisiest authorities insisted on its being received, for good or for evil, in the \
superlative degree of comparison only.
"""
