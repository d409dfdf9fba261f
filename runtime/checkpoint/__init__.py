"""Checkpoints: what a parallel module and its optimizer are, on disk, readable under any other plan, mesh and world size.

    folder/
      latest                     the name of the newest one
      step-00000100/
        manifest.json            every tensor, where its pieces are; a checksum of every piece
        state.json               step, random state, the optimizer's scalars, what the user added
        rank-00000.safetensors   the pieces that one rank wrote

=================== ==============================================================================================
``pieces``            a tensor as this rank holds it: boxes of the whole one
``optimizer_state``   an optimizer as tensors and scalars by parameter name, and back
``contents``          everything of a module and its optimizer that is saved
``storage``           storage and planners for ``torch.distributed.checkpoint``
``catalogue``         what is in a checkpoint, ours or plain safetensors: checked before anything is read
``folder``            the directory of checkpoints: steps, ``latest``, leftovers, one writer at a time
``save``, ``load``    the two ways
``methods``           the methods of the modules
=================== ==============================================================================================
"""
