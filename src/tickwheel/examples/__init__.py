"""Examples to read and to copy from; `tickwheel demo` plays them.

`shop` is what a user writes. `story` drives it through a sales day, `account` checks at the end
what became of every order, `view` draws it.
"""
