// Command oracle runs the steps of containerd and CRI-O on a directory of CDI specifications: it loads them with the
// CDI project's library, injects the named devices into an empty OCI specification and prints the result.
package main

import (
	"encoding/json"
	"fmt"
	"os"

	oci "github.com/opencontainers/runtime-spec/specs-go"
	"tags.cncf.io/container-device-interface/pkg/cdi"
)

func main() {
	if len(os.Args) < 3 {
		fail("usage: oracle DIRECTORY DEVICE...")
	}
	cache, err := cdi.NewCache(cdi.WithSpecDirs(os.Args[1]), cdi.WithAutoRefresh(false))
	if err != nil {
		fail("cannot open the cache: %v", err)
	}
	for path, errs := range cache.GetErrors() {
		fail("%s: %v", path, errs)
	}
	spec := &oci.Spec{}
	if missing, err := cache.InjectDevices(spec, os.Args[2:]...); err != nil {
		fail("cannot inject %v: %v", missing, err)
	}
	encoder := json.NewEncoder(os.Stdout)
	encoder.SetIndent("", "  ")
	if err := encoder.Encode(spec); err != nil {
		fail("cannot print: %v", err)
	}
}

func fail(format string, arguments ...any) {
	fmt.Fprintf(os.Stderr, format+"\n", arguments...)
	os.Exit(1)
}
