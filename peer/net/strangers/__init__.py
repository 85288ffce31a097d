"""Limits for peers that are admitted to nothing: how many connections and handshakes, how often, and when.

    shares they give way to each other and to trusted peers allowances they may connect and call at a limited rate
    claims the addresses that they claim are dialled at a limited rate turns work for them runs only when the event loop
    is idle, one piece after the other

`peer.net.libp2p_fixes` calls these where py-libp2p accepts a socket, a stream or a message.
"""
