"""What peers that are admitted to nothing may take of a host: how many connections and handshakes, how often, and when.

    shares      they give way to each other and to trusted peers
    allowances  they may connect and call only so often
    claims      addresses that they say are theirs are dialled only so often
    turns       what they have us do is done when nothing else is to be done, one piece after the other

`peer.net.libp2p_fixes` calls these where py-libp2p accepts a socket, a stream or a message.
"""
