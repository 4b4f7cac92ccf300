"""The .qsf file: writing one, reading one and checking it (docs/format.md).

Writing and reading, in short::

    with Writer(path, header, arch) as w:  # qsf.file.writer
        w.begin_unit(0, dtype=Dtype.Q8)
        w.begin_tensor(TensorType.EMBEDDING, n_vocab, dim, Dtype.Q8, Layout.TILES)
        w.write(tiles)
        ...

    with Reader(path) as r:  # qsf.file.reader: the engine's
        print(r.header.n_layers, r.tensor(1, TensorType.Q))
"""
# SPDX-License-Identifier: Apache-2.0
