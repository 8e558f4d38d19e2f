//! Link arguments of `libvgpu.so`.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // Without `std` nothing asks for libc. Before glibc 2.34 `dlvsym` lived in libdl, by that file name;
    // since then the file is an empty shell. It must be named although nothing here is found in it.
    println!("cargo::rustc-cdylib-link-arg=-Wl,--no-as-needed");
    println!("cargo::rustc-cdylib-link-arg=-l:libdl.so.2");
    println!("cargo::rustc-cdylib-link-arg=-Wl,--as-needed");
    println!("cargo::rustc-cdylib-link-arg=-lc");
    // Its functions are its own wherever it stands in the program's order: behind a stub, the C library's `dlsym` and
    // whatever the program exports under a name of the driver's come before.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-Bsymbolic");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libvgpu.so");
}
