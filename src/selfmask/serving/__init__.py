"""One backbone and any number of masks behind one address: files, packed bits, expanded weights; queue; HTTP."""
