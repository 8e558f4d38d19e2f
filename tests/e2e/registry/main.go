// Command registry serves images from OCI archives to clients that know a user and a password, until its standard input ends.
//
//	registry -listen 127.0.0.1:5000 -user drava -password secret drava-controller:dev=drava-controller.tar
package main

import (
	"archive/tar"
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/remote"
)

func main() {
	listen := flag.String("listen", "127.0.0.1:5000", "address")
	user := flag.String("user", "", "user of the clients")
	password := flag.String("password", "", "password of the clients")
	flag.Parse()
	if err := run(*listen, authn.Basic{Username: *user, Password: *password}, flag.Args()); err != nil {
		log.Fatal(err)
	}
}

func run(address string, login authn.Basic, images []string) error {
	listener, err := net.Listen("tcp", address)
	if err != nil {
		return err
	}
	served := make(chan error, 1)
	go func() { served <- http.Serve(listener, protected(registry.New(), login)) }()
	for _, image := range images {
		reference, archive, found := strings.Cut(image, "=")
		if !found {
			return fmt.Errorf("%s is not NAME=ARCHIVE", image)
		}
		if err := push(address+"/"+reference, archive, &login); err != nil {
			return fmt.Errorf("push %s: %w", image, err)
		}
	}
	fmt.Println("ready")
	ended := make(chan struct{})
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		close(ended)
	}()
	select {
	case err := <-served:
		return err
	case <-ended:
		return nil
	}
}

// protected answers only requests with the login.
func protected(handler http.Handler, login authn.Basic) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		user, password, ok := r.BasicAuth()
		if !ok || user != login.Username || password != login.Password {
			w.Header().Set("WWW-Authenticate", `Basic realm="registry"`)
			http.Error(w, "unauthorized", http.StatusUnauthorized)
			return
		}
		handler.ServeHTTP(w, r)
	})
}

// push writes the only image of an OCI archive to the registry. The digest of the image stays.
func push(reference, archive string, login authn.Authenticator) error {
	tag, err := name.NewTag(reference, name.Insecure)
	if err != nil {
		return err
	}
	directory, err := os.MkdirTemp("", "registry")
	if err != nil {
		return err
	}
	defer os.RemoveAll(directory)
	if err := unpack(archive, directory); err != nil {
		return err
	}
	index, err := layout.ImageIndexFromPath(directory)
	if err != nil {
		return err
	}
	manifest, err := index.IndexManifest()
	if err != nil {
		return err
	}
	if len(manifest.Manifests) != 1 {
		return fmt.Errorf("%s has %d images", archive, len(manifest.Manifests))
	}
	image, err := index.Image(manifest.Manifests[0].Digest)
	if err != nil {
		return err
	}
	return remote.Write(tag, image, remote.WithAuth(login))
}

// unpack writes the files of an archive into a directory.
func unpack(archive, directory string) error {
	file, err := os.Open(archive)
	if err != nil {
		return err
	}
	defer file.Close()
	reader := tar.NewReader(file)
	for {
		header, err := reader.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if header.Typeflag != tar.TypeReg || !filepath.IsLocal(header.Name) {
			continue
		}
		path := filepath.Join(directory, header.Name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		if err := write(path, reader); err != nil {
			return err
		}
	}
}

func write(path string, content io.Reader) error {
	file, err := os.Create(path)
	if err != nil {
		return err
	}
	if _, err := io.Copy(file, content); err != nil {
		_ = file.Close()
		return err
	}
	return file.Close()
}
