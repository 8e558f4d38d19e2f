//! Link arguments of `libvgpu.so`.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // Without `std` nothing links libc. Before glibc 2.34 `dlvsym` was in libdl; since then the file is an empty shell,
    // which must be linked although no symbol is found in it.
    println!("cargo::rustc-cdylib-link-arg=-Wl,--no-as-needed");
    println!("cargo::rustc-cdylib-link-arg=-l:libdl.so.2");
    println!("cargo::rustc-cdylib-link-arg=-Wl,--as-needed");
    println!("cargo::rustc-cdylib-link-arg=-lc");
    // The library's functions bind to its own symbols, wherever it is in the search order: behind a stub, the C
    // library's `dlsym` and the program's own exports come first.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-Bsymbolic");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libvgpu.so");
}
