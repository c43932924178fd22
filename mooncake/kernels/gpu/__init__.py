"""The functions of ``reference`` on a GPU: ``kernels`` has them all, ``triton_…`` what is compiled for it."""
